"""PushT: a T is pushed onto its goal by a round agent."""
