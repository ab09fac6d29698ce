"""What is done to the pixels of a batch of images, on their device."""
