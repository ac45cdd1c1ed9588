"""Rules of Wordle: words, feedback, states and remaining candidates."""
