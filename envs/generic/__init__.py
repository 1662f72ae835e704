"""Any environment of gymnasium, described in a suite."""
