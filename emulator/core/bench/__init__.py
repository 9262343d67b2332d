"""The load generator's decisions: when to send what, what a server's stream says, and what it all comes to."""
