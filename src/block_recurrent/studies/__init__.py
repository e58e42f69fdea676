"""Experiments that train and measure: the planted names of `brt recall`, the tables of `brt reproduce`."""
