"""Process start, stop, locks, addresses and file locations. Imports nothing else of the package."""
