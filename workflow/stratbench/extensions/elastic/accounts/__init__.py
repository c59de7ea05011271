"""What elastic workers did, as the record says it: accounts of the gang and of servers, and the history."""
