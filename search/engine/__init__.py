"""The Ray Tune engine that runs methods and trials."""
