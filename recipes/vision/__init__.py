"""Images: classification, its networks and its data sets."""
