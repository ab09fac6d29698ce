"""Files that survive a crash: written whole or not at all, verified before they are believed."""
