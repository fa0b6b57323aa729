//! The search for the largest that fits, several tries at a time.

/// The largest of `1..=most` that fits, or 0, where whatever is smaller than one that fits does, too. `fits` is asked for up to `ways` at a time, ascending
/// (Abacus §6.3: as one pass of the predictor), `log` to the base of `ways + 1` times. Where it is not so, what is found was still said to fit.
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
