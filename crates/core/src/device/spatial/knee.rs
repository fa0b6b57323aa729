//! The knee: the share of a device that is worth having.

/// The part by which a throughput may be below the largest and still count as "hardly less". GSLICE
/// §2.1.3 reads the knee off a plot, where there is "only a marginal improvement"; the 5% are ours.
pub const KNEE_TOLERANCE: f64 = 0.05;

/// The first share of a model without a measured knee (GSLICE §3.2.3).
pub const UNKNOWN_KNEE: f64 = 0.3;

/// The smallest share of a device, in compute units, from which on the throughput is within
/// `tolerance` of the largest. `points` are units and items per second, in any order. NaN counts as
/// no throughput. Returns `None` for fewer than two points.
pub fn knee(points: &[(u32, f64)], tolerance: f64) -> Option<u32> {
    let mut points = points.to_vec();
    points.sort_by_key(|(units, _)| *units);
    let (mut best, mut knee) = (0.0_f64, None);
    // The loop goes down from the largest share as long as the loss is small. A smaller share
    // behind a worse one is luck.
    for (units, throughput) in points.iter().rev() {
        best = best.max(*throughput);
        if throughput.is_nan() || *throughput < best * (1.0 - tolerance) {
            break;
        }
        knee = Some(*units);
    }
    knee.filter(|_| points.len() > 1)
}

/// The knee that a model's share begins with. `knees` has batch sizes, ascending, with their knees.
/// The knee is that of the largest batch up to `most`. If all batches are larger, it is that of the
/// smallest batch. GSLICE §2.1.3: "with larger batch sizes, the knee shifts towards larger GPU%". A
/// share by the knee of single items would be too small for the batches under load.
pub fn knee_up_to(knees: &[(u32, u32)], most: u32) -> Option<u32> {
    let fits = knees.iter().rfind(|(batch, _)| *batch <= most);
    fits.or(knees.first()).map(|(_, units)| *units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_2_1_3_beyond_the_knee_more_units_bring_little() {
        // Figure 3: a batch of 1 gains next to nothing beyond 30%, while a larger one still gains.
        let small: Vec<(u32, f64)> = (1..=10).map(|n| (n * 10, f64::from(n.min(3)))).collect();
        assert_eq!(knee(&small, KNEE_TOLERANCE), Some(30));
        let large: Vec<(u32, f64)> = (1..=10).map(|n| (n * 10, f64::from(n))).collect();
        assert_eq!(knee(&large, KNEE_TOLERANCE), Some(100));
        assert_eq!(knee(&large, 0.25), Some(80), "within 25% of the whole");
    }

    #[test]
    fn one_point_is_no_curve_and_no_number_is_no_throughput() {
        assert_eq!(knee(&[(132, 1.0)], KNEE_TOLERANCE), None);
        assert_eq!(knee(&[], KNEE_TOLERANCE), None);
        assert_eq!(knee(&[(8, f64::NAN), (132, 1.0)], KNEE_TOLERANCE), Some(132));
    }

    #[test]
    fn section_2_1_3_the_largest_batch_decides_because_its_knee_is_larger() {
        let knees = [(1, 24), (4, 40), (16, 72)];
        assert_eq!([0, 1, 15, 16, 64].map(|most| knee_up_to(&knees, most)), [24, 24, 40, 72, 72].map(Some));
        assert_eq!(knee_up_to(&[(4, 30)], 2), Some(30), "no smaller batch was measured");
        assert_eq!(knee_up_to(&[], 8), None);
    }

    #[test]
    fn small_steps_that_add_up_are_no_flat_end() {
        // Each point is within 5% of the next, but all together are not.
        let slope = [(8, 86.0), (16, 89.0), (24, 92.0), (32, 96.0), (40, 100.0)];
        assert_eq!(knee(&slope, KNEE_TOLERANCE), Some(32));
    }

    #[test]
    fn a_small_share_that_was_lucky_behind_a_worse_one_is_none() {
        assert_eq!(knee(&[(8, 100.0), (16, 60.0), (24, 99.0), (32, 100.0)], KNEE_TOLERANCE), Some(24));
    }
}
