"""Trained policies in folders of their own, for programs and robots that have no Ray."""
