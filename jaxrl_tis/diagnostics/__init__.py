"""What is measured of a batch. Nothing here decides anything."""
