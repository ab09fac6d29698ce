"""Texts as token numbers."""
