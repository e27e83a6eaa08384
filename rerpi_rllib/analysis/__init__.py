"""What finished runs say: curves, statistics, plots, tables and reports."""
