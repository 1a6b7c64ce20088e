"""What every other room needs: settings, the project folder, the errors."""
