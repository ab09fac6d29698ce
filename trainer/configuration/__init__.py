"""From the words of a command line to objects: Hydra's grammar, checked at every node. Below this nobody sees a cfg."""
