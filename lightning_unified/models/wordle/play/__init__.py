"""Players of Wordle: solvers, the trained model, games between them, and the terminal."""
