"""Every format of packed SFT data there is: recognised, read, written, and converted into each other."""
