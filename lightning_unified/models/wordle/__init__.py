"""Wordle for language models: the words and their feedback, prompts, rewards, solvers, games. Nothing here needs torch to play."""
