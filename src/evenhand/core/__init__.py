"""What every room stands on (errors, arrays, files, plug-ins, settings); imports no other room."""
