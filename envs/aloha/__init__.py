"""ALOHA's two arms, of gym-aloha: hand a cube from one to the other."""
