"""Processes before there is a process group: which is which, where they meet, how they end."""
