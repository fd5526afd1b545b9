"""What scripts/doctor.py says of a machine: packages, devices, backends, ranks, data, teacher, memory and disk, and a verdict."""
