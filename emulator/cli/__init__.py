"""The `pdemu` command: options into topologies, results onto the terminal."""
