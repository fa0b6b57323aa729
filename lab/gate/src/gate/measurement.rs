//! Runs a way under callgrind, and reads the results.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::gate::counters::{Counter, KINDS};
use crate::gate::counts::Counts;
use crate::gate::locks::{self, Atomic};
use crate::gate::part;
use crate::gate::profile::Profile;
use crate::gate::still::HANDSHAKE;
use crate::gate::ways::Way;

/// The cost of a way.
pub struct Measured {
    /// The number of requests in the difference of both parts.
    pub requests: u64,
    /// The cost of one request.
    pub counts: Counts,
    /// The profile of all requests.
    pub profile: Profile,
    /// The atomic instructions of all requests.
    pub atomics: Vec<Atomic>,
    /// The system calls of all requests, by name.
    pub system_calls: BTreeMap<String, i64>,
}

/// The counts of the second part less the counts of the first, for all processes together.
#[derive(Default)]
struct Difference {
    profile: Profile,
    counters: [i64; KINDS],
    /// The system calls, by name.
    system_calls: BTreeMap<String, i64>,
}

/// Counts the cost of a request on this way.
///
/// # Errors
/// If valgrind is missing, or the way fails.
pub fn measure(way: Way) -> Result<Measured> {
    ensure!(
        std::arch::is_x86_feature_detected!("avx2"),
        "this processor lacks AVX2, so that valgrind shows the program another processor, and it takes other ways; count on a newer one"
    );
    let difference = run(way, under_callgrind)?;
    let requests = way.requests();
    // A negative count is noise around zero.
    let each = |count: i64| (100.0 * count as f64 / requests as f64).round().max(0.0) / 100.0;
    let of_client = |(name, _): &(&String, &i64)| name.contains("server::ask_as_client");
    let client: i64 = difference.profile.by_function.iter().filter(of_client).map(|(_, count)| count).sum();
    let atomics = locks::atomics(&difference.profile.by_place)?;
    let futexes = difference.system_calls.get("sys_futex").copied().unwrap_or_default();
    let counter = |counter: Counter| each(difference.counters[counter as usize]);
    let switches = || anyhow::Ok(each(run(way, on_one_core)?.counters[Counter::Switches as usize]));
    let counts = Counts {
        instructions: each(difference.profile.total - client).round(),
        allocations: counter(Counter::Allocations),
        allocated_bytes: counter(Counter::Bytes),
        locks: each(atomics.iter().filter(|atomic| atomic.is_lock).map(|atomic| atomic.count).sum()),
        atomics: each(atomics.iter().map(|atomic| atomic.count).sum()),
        system_calls: each(difference.system_calls.values().sum()),
        futex_calls: each(futexes),
        clock_reads: counter(Counter::ClockReads),
        context_switches: way.crosses().then(switches).transpose()?,
    };
    ensure!(counts.instructions > 0.0, "nothing was counted of {}", way.name());
    let Difference { profile, system_calls, .. } = difference;
    Ok(Measured { requests, counts, profile, atomics, system_calls })
}

/// Callgrind's command line, up to the program.
fn under_callgrind(folder: &Path) -> Command {
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--instr-atstart=no", "--trace-children=yes"])
        .args(["--dump-instr=yes", "--dump-line=no", "--compress-pos=no", "--trace-syscalls=yes"])
        .arg(format!("--callgrind-out-file={}", folder.join("profile.%p").display()))
        .arg(format!("--log-file={}", folder.join("calls.%p").display()));
    command
}

/// Without callgrind, processes wait as they do in service. On one core each answer comes after its
/// process has begun to wait.
fn on_one_core(_folder: &Path) -> Command {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or("0");
    let first = allowed.trim().split([',', '-']).next().unwrap_or("0");
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", first]);
    command
}

/// Runs a way in a process whose command line begins with `prefix`.
fn run(way: Way, prefix: impl FnOnce(&Path) -> Command) -> Result<Difference> {
    let folder = tempfile::tempdir()?;
    let [folder_variable, requests_variable] = part::VARIABLES;
    let mut command = prefix(folder.path());
    command
        .arg(std::env::current_exe()?)
        .args(["run", &way.name()])
        .env(folder_variable, folder.path())
        .env(requests_variable, way.requests().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let program = command.get_program().to_string_lossy().into_owned();
    let hint = format!("{program} does not start; on Debian: apt-get install valgrind binutils util-linux");
    let output = command.output().context(hint)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} by {program}: {}: {said}", way.name(), output.status);
    let mut difference = Difference::default();
    for entry in fs::read_dir(folder.path())? {
        difference.read(way, &entry?.path())?;
    }
    Ok(difference)
}

impl Difference {
    fn read(&mut self, way: Way, path: &Path) -> Result<()> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(of) = name.strip_prefix("profile.") {
            // The name holds the process and the part; the counts after the last part have no
            // number.
            let Some(part) = of.split_once('.').and_then(|(_, part)| part.parse().ok()) else { return Ok(()) };
            let profile = Profile::read(&fs::read_to_string(path)?).with_context(|| name.to_owned())?;
            self.profile.add(&profile, times(part));
        } else if name.starts_with("counters.") {
            for (part, line) in (1..).zip(fs::read_to_string(path)?.lines()) {
                for (sum, count) in self.counters.iter_mut().zip(line.split(' ')) {
                    *sum += times(part) * count.parse::<i64>()?;
                }
            }
        } else if name.starts_with("calls.") {
            self.read_calls(way, &String::from_utf8_lossy(&fs::read(path)?));
        }
        Ok(())
    }

    /// Reads lines as `SYSCALL[13064,1](257) sys_openat ( ...`: process, thread, number, name. Two
    /// marks are around each part.
    fn read_calls(&mut self, way: Way, text: &str) {
        let handshake = format!(", {HANDSHAKE}, ");
        let mut marks = 0;
        for line in text.lines() {
            let Some((thread, call)) = call_of(line) else { continue };
            if call == "sys_getppid" {
                marks += 1;
            } else if marks % 2 == 1 && !(way.has_client() && thread == 1) && !line.contains(&handshake) {
                *self.system_calls.entry(call.to_owned()).or_default() += times(marks / 2 + 1);
            }
        }
    }
}

/// The weight of a part in the difference: the second part counts, the first is subtracted.
fn times(part: u32) -> i64 {
    match part {
        1 => -1,
        2 => 1,
        _ => 0,
    }
}

/// Returns the thread and the name of the call at the begin of a line of valgrind's.
fn call_of(line: &str) -> Option<(u32, &str)> {
    let rest = &line[line.find("SYSCALL[")?..];
    let (who, rest) = rest.split_once(']')?;
    let thread = who.split_once(',')?.1.parse().ok()?;
    let call = rest.split_once(") ")?.1.split(' ').next()?;
    call.starts_with("sys_").then_some((thread, call))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_known_by_the_line_that_it_begins_with() {
        assert_eq!(call_of("SYSCALL[13064,2](202) sys_futex ( 0x1 ) --> [async] ... "), Some((2, "sys_futex")));
        assert_eq!(call_of("SYSCALL[13064,2](202) ... [async] --> Success(0x4) "), None);
        assert_eq!(call_of("==13064== Callgrind"), None);
    }

    #[test]
    fn calls_count_between_marks_and_the_clients_do_not() {
        let call = |thread: u32, name: &str| format!("SYSCALL[7,{thread}](1) {name} ( ) --> [async] ... \n");
        let mark = call(1, "sys_getppid");
        let (first, second) = (call(2, "sys_read"), call(2, "sys_read").repeat(2) + &call(1, "sys_write"));
        let text = [call(2, "sys_open"), mark.clone(), first, mark.clone(), mark.clone(), second, mark].concat();
        let mut difference = Difference::default();
        difference.read_calls(Way::Grpc, &text);
        assert_eq!(difference.system_calls, [("sys_read".to_owned(), 1)].into());
    }
}
