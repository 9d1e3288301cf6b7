"""What must not leave the machine: below all rooms that show foreign text, which every one of them may."""
