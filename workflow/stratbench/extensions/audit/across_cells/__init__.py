"""Rules of the audit that compare several cells."""
