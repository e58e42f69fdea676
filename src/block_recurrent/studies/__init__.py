"""Experiments that train and measure: so far the planted names of `brt recall`."""
