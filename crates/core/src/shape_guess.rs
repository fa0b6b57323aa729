//! Guesses how long requests of a never measured shape take, from the most similar measured shape.

use crate::profile::LatencyProfile;
use crate::time::Duration;

/// Finds the shape in `known` whose number of elements is nearest to that of `shape`. Returns its
/// value, and how many times as many elements `shape` has. `None` if `known` is empty. Dimensions
/// below 1 count as 1.
pub fn nearest_shape<'a, T>(known: impl IntoIterator<Item = (&'a [i64], T)>, shape: &[i64]) -> Option<(T, f64)> {
    let elements = |shape: &[i64]| shape.iter().map(|d| (*d).max(1) as f64).product::<f64>();
    let wanted = elements(shape);
    let scaled = known.into_iter().map(|(other, what)| (what, wanted / elements(other)));
    scaled.min_by(|(_, a), (_, b)| a.ln().abs().total_cmp(&b.ln().abs()))
}

/// The profile of requests with `scale` times as many elements: latencies grow in proportion. The
/// whole profile is a guess ([`LatencyProfile::known`] is 0). With an SLO, a batch of one takes at
/// most half of the SLO: a new shape gets its first batch by its deadline.
#[must_use]
pub fn guessed_profile(profile: &LatencyProfile, scale: f64, slo: Option<Duration>) -> LatencyProfile {
    let alone = profile.latency(1).as_secs_f64();
    let scale = slo.map_or(scale, |slo| scale.min(0.5 * slo.as_secs_f64() / alone));
    let scaled = |b| Duration::from_nanos(((profile.latency(b).as_nanos() as f64 * scale) as u64).max(1));
    // The table is positive and never falls, as that of `profile`.
    let guessed = LatencyProfile::from_table((1..=profile.max_batch()).map(scaled).collect());
    guessed.unwrap_or_else(|_| profile.clone()).learned(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_shape_is_that_of_the_nearest_number_of_elements() {
        let known = [(&[10, 10][..], 'a'), (&[100], 'b'), (&[-1, 400], 'c')];
        assert_eq!(nearest_shape(known, &[150]), Some(('a', 1.5)), "of two alike the first");
        assert_eq!(nearest_shape(known, &[800]), Some(('c', 2.0)));
        assert_eq!(nearest_shape(Vec::<(&[i64], char)>::new(), &[1]), None);
    }

    #[test]
    fn a_guess_is_in_proportion_and_within_half_of_the_slo() {
        let ms = Duration::from_millis;
        let profile = LatencyProfile::linear(ms(1), ms(3), 4).unwrap();
        assert_eq!(guessed_profile(&profile, 2.0, None).latency(4), ms(14));
        assert_eq!(guessed_profile(&profile, 2.0, Some(ms(4))).latency(1), ms(2));
        assert_eq!(guessed_profile(&profile, 0.0, None).latency(1), Duration::from_nanos(1));
        assert_eq!(guessed_profile(&profile, 2.0, None).known(), Some(0), "nothing of it was measured");
    }
}
