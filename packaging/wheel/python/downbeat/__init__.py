"""Python parts of Downbeat. `downbeat.ray` starts a cluster of Downbeat on Ray; the server itself is the program `downbeat`."""
