//! Compares new counts with the counts in the file.

use crate::gate::counts::Counts;
use crate::gate::ways::Way;

/// The tolerance of a count, as a share of the written count.
const TOLERANCE: f64 = 0.01;
/// The tolerance of calls and switches of the operating system, if a way goes from process to
/// process.
const TOLERANCE_ACROSS: f64 = 0.10;
/// The tolerance where the server answers a client: a lone request also wakes the alarm's thread,
/// whose number of waits varies.
const TOLERANCE_OF_SERVER: f64 = 0.05;
/// A difference of this much is never reported: one request in a hundred may do more than the
/// others.
const LEAST: f64 = 0.02;

/// The advice behind a list of differences.
pub const ADVICE: &str = "\
A request costs something else than lab/gate/counts.toml says.
If a number rose, make the change cheaper: `downbeat-gate features WAY` says where instructions are. If the change is worth it,
write the new number by `just counts --write` in the same commit, and say in its message which rose and why.
If a number fell, write the lower one by the same command, so that it cannot rise again unseen.";

/// Returns each difference of a way, in words.
pub fn compare(way: Way, written: Option<&Counts>, counted: &Counts) -> Vec<String> {
    let Some(written) = written else {
        return vec![format!("{}: there are no numbers yet; write them by `just counts --write`", way.name())];
    };
    let each = written.named().into_iter().zip(counted.named());
    each.filter_map(|((name, then, is_of_system), (_, now, _))| {
        let tolerance = match is_of_system {
            true if way.crosses() => TOLERANCE_ACROSS,
            true if way.has_client() => TOLERANCE_OF_SERVER,
            // The alarm's thread takes atomic steps, too: three runs of one binary differed by
            // 0.9%.
            false if way.has_client() && name == "atomics" => TOLERANCE_OF_SERVER,
            _ => TOLERANCE,
        };
        let more = now - then;
        if more.abs() <= (then * tolerance).max(LEAST) {
            return None;
        }
        let went = if more > 0.0 { "rose" } else { "fell" };
        let percent = if then == 0.0 { String::new() } else { format!(", {:+.1}%", 100.0 * more / then) };
        Some(format!("{}: {name} {went} from {then} to {now} a request ({more:+.2}{percent})", way.name()))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(instructions: f64, allocations: f64) -> Counts {
        Counts { instructions, allocations, ..Counts::default() }
    }

    #[test]
    fn one_more_allocation_is_said_and_noise_is_not() {
        let written = counts(20_000.0, 40.0);
        assert_eq!(compare(Way::HttpBinary, Some(&written), &counts(20_150.0, 40.0)), Vec::<String>::new());
        let said = compare(Way::HttpBinary, Some(&written), &counts(20_150.0, 41.0));
        assert_eq!(said, ["http-binary: allocations rose from 40 to 41 a request (+1.00, +2.5%)"]);
        assert_eq!(compare(Way::HttpBinary, Some(&written), &counts(15_000.0, 40.0)).len(), 1);
        assert_eq!(compare(Way::HttpBinary, None, &written).len(), 1);
    }
}
