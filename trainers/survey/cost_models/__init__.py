"""Models of the literature that predict the time of training: small, readable, each with what it leaves out."""
