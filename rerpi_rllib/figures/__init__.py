"""The paper's figures, and the experiment on functions with a known optimum behind some of them."""
