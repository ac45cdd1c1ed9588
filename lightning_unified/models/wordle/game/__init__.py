"""The game itself: words, feedback, states and remaining candidates."""
