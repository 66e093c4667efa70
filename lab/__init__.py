"""What the commands and the tests share. Nobody needs to read this to do the lab."""
