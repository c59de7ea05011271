"""Communication between workers and servers: frames, handshake, shared memory and sockets."""
