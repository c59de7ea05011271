"""The record of elastic workers: accounts of their group and of servers, and the history."""
