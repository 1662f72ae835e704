"""Video pipelines of diffusers as worlds: Cosmos Predict2 and 2.5 video-to-world, Wan image-to-video."""
