//! Clusters of requests with similar lengths (DVABatch §7.2, policy I).

use super::super::segment_profile::SegmentProfile;
use crate::time::Duration;

/// Divides requests into clusters that take the least total time one after another. Requests are
/// (length, items) in ascending order of length. Each cluster is padded to its longest request, and
/// has at most `max_rows` items. Returns the end of each cluster.
///
/// The paper clusters by similarity without saying how. This algorithm is optimal for the measured
/// latencies, by dynamic programming over the distinct lengths.
pub fn clusters(requests: &[(u32, u32)], profile: &SegmentProfile, max_rows: u32) -> Vec<usize> {
    // A cluster may end where the length changes, or where it cannot get larger.
    let mut ends: Vec<usize> = (1..requests.len()).filter(|end| requests[end - 1].0 != requests[*end].0).collect();
    ends.push(requests.len());
    let mut rows_before = vec![0u32; requests.len() + 1];
    for (index, (_, rows)) in requests.iter().enumerate() {
        rows_before[index + 1] = rows_before[index] + rows;
    }
    if requests.is_empty() {
        return Vec::new();
    }
    // A run of equal lengths that is too large for one batch is cut at the limit.
    let mut cuts = Vec::with_capacity(ends.len());
    let mut begin = 0;
    for end in ends {
        let mut first = begin;
        for at in begin + 1..=end {
            if rows_before[at] - rows_before[first] > max_rows {
                cuts.push(at - 1);
                first = at - 1;
            }
        }
        cuts.push(end);
        begin = end;
    }
    cuts.dedup();
    // best[i]: the least time for all requests up to cuts[i - 1], and the cut at which its last
    // cluster begins.
    let mut best: Vec<(Duration, usize)> = vec![(Duration::ZERO, 0)];
    for (index, end) in cuts.iter().enumerate() {
        let length = requests[end - 1].0;
        let mut least = (Duration::MAX, index);
        for from in (0..=index).rev() {
            let begin = if from == 0 { 0 } else { cuts[from - 1] };
            let rows = rows_before[*end] - rows_before[begin];
            if rows > max_rows && from < index {
                break;
            }
            let time = best[from].0 + profile.total(rows, length);
            // Of equal times, smaller clusters win: the first ones are answered sooner.
            if time < least.0 {
                least = (time, from);
            }
        }
        best.push(least);
    }
    let mut found = Vec::new();
    let mut at = cuts.len();
    while at > 0 {
        found.push(cuts[at - 1]);
        at = best[at].1;
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::LatencyProfile;

    /// A profile with `fixed` ms a batch and `token` ms for each row and token.
    fn profile(fixed: f64, token: f64) -> SegmentProfile {
        let at = |length: f64| LatencyProfile::linear_ms(token * length, fixed, 64).unwrap();
        SegmentProfile::new(vec![1, 1000], &[vec![at(1.0), at(1000.0)]]).unwrap()
    }

    #[test]
    fn unlike_lengths_are_parted_where_padding_costs_more_than_a_batch() {
        let requests = [(10, 1), (12, 1), (14, 1), (200, 1)];
        assert_eq!(clusters(&requests, &profile(1.0, 0.1), 64), [3, 4]);
        assert_eq!(clusters(&requests, &profile(100.0, 0.1), 64), [4], "a batch more costs more than the padding");
        assert_eq!(clusters(&requests, &profile(0.001, 0.1), 64), [1, 2, 3, 4]);
    }

    #[test]
    fn no_cluster_is_larger_than_a_batch_may_be() {
        let requests = [(7, 2); 10];
        let ends = clusters(&requests, &profile(100.0, 0.1), 6);
        assert_eq!(ends, [3, 6, 9, 10]);
        assert_eq!(clusters(&[], &profile(1.0, 1.0), 6), [0usize; 0]);
    }

    #[test]
    fn no_parting_of_few_requests_takes_less_time() {
        // Compares with all 2^(n-1) ways, for some requests that need several clusters.
        for seed in 0..200u32 {
            let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
            let mut draw = |most: u32| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                1 + (state >> 16) % most
            };
            let mut requests: Vec<(u32, u32)> = (0..8).map(|_| (draw(300), 1)).collect();
            requests.sort_unstable();
            let profile = profile(f64::from(draw(30)), 0.1);
            let time = |ends: &[usize]| {
                let mut begin = 0;
                let mut sum = Duration::ZERO;
                for end in ends {
                    sum += profile.total((end - begin) as u32, requests[end - 1].0);
                    begin = *end;
                }
                sum
            };
            let found = time(&clusters(&requests, &profile, 64));
            for mask in 0..1u32 << 7 {
                let ends: Vec<usize> = (1..8).filter(|end| mask >> (end - 1) & 1 == 1).chain([8]).collect();
                assert!(found <= time(&ends), "seed {seed}: {requests:?} by {ends:?}");
            }
        }
    }
}
