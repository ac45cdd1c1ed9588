"""The exactness check: its verdicts, its cost, and encoders of losses over pairs."""
