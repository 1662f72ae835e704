"""Other clients' protocols on the same session core: what a robot that exists already speaks."""
