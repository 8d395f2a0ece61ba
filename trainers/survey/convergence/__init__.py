"""Bounds and rates of stochastic gradient descent, measured; see Ben-Nun and Hoefler (2019), section 2.4 and 6.2."""
