"""What a trained model predicts, and how good that is."""
