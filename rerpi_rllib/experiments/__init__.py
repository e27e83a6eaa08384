"""Running, watching, plotting and evaluating: everything behind the command line."""
