//! The linear regression of group times, which the paper compares with the perceptron (Abacus
//! §5.5).

use downbeat_training::GroupSample;

/// Fits the linear regression of group times on their features, by least squares. Returns a
/// constant, then one number for each feature.
pub fn train_linear(samples: &[&GroupSample]) -> Vec<f64> {
    let width = samples.first().map_or(0, |sample| sample.features.len()) + 1;
    let mut rows = vec![vec![0.0; width + 1]; width];
    for sample in samples {
        let x: Vec<f64> = [1.0].into_iter().chain(sample.features.iter().map(|x| f64::from(*x))).collect();
        for (row, a) in rows.iter_mut().zip(&x) {
            row.iter_mut().zip(&x).for_each(|(sum, b)| *sum += a * b);
            row[width] += a * sample.takes_ms;
        }
    }
    for (index, row) in rows.iter_mut().enumerate() {
        // The bits add up to the constant. Without this term there is no unique solution.
        row[index] += 1e-6 * samples.len() as f64;
    }
    for pivot in 0..width {
        let best = (pivot..width).max_by(|a, b| rows[*a][pivot].abs().total_cmp(&rows[*b][pivot].abs()));
        rows.swap(pivot, best.unwrap_or(pivot));
        let of = rows[pivot].clone();
        for (index, row) in rows.iter_mut().enumerate().filter(|(index, _)| *index != pivot) {
            let factor = if of[pivot] == 0.0 { 0.0 } else { row[pivot] / of[pivot] };
            debug_assert!(index < width, "as many rows as unknowns");
            row.iter_mut().zip(&of).for_each(|(value, by)| *value -= factor * by);
        }
    }
    rows.iter().enumerate().map(|(index, row)| row[width] / row[index]).collect()
}

/// Returns a linear regression's prediction for a group's features.
pub fn predict_linear(coefficients: &[f64], features: &[f32]) -> f64 {
    let (constant, rest) = coefficients.split_first().unwrap_or((&0.0, &[]));
    constant + rest.iter().zip(features).map(|(factor, x)| factor * f64::from(*x)).sum::<f64>()
}
