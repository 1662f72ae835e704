"""What every trainer shares: recipes, demonstrations on disk, optimiser set-up, checkpoints and cards."""
