"""What people read: the verdict on a log, a class explained, and the archive to attach."""
