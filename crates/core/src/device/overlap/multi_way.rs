//! The search for the largest number that fits, with several tries at a time.

/// Finds the largest number of `1..=most` that fits, or 0. Each call of `fits` gets up to `ways`
/// ascending numbers (Abacus §6.3: one pass of the predictor). There are `log` to the base of `ways
/// + 1` calls. The search assumes that every smaller number fits, too. Otherwise its result still
/// is a number that `fits` accepted.
pub fn multi_way(most: usize, ways: usize, mut fits: impl FnMut(&[usize]) -> Vec<bool>) -> usize {
    let (mut fitting, mut beyond) = (0, most + 1);
    while beyond - fitting > 1 {
        let gap = beyond - fitting;
        let ways = ways.clamp(1, gap - 1);
        let tries: Vec<usize> = (1..=ways).map(|way| fitting + way * gap / (ways + 1)).collect();
        let fit = fits(&tries).into_iter().take_while(|fits| *fits).count().min(tries.len());
        if let Some(first) = tries.get(fit) {
            beyond = *first;
        }
        if let Some(last) = fit.checked_sub(1) {
            fitting = tries[last];
        }
    }
    fitting
}
