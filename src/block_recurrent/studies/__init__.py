"""Experiments that train and measure: `brt recall`, `brt reproduce`, `brt tasks` and `brt demo`."""
