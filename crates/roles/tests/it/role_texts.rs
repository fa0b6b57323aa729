//! The messages and actions of role scenarios, as text for their scripts and timelines.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, DropReason, Reject};
use downbeat_core::{BatchId, Duration, LatencyProfile};
use downbeat_roles::*;

/// Tensors: the number of the request that they belong to.
pub type P = u64;

/// The run of a batch of `items` that took this long, for the frontend that counts the batch.
pub fn batch_run((items, compute_infer): (u32, Duration)) -> BatchRun {
    let (compute_input, compute_output, ended_ago) = Default::default();
    BatchRun { device: 0, items, compute_input, compute_infer, compute_output, ended_ago, counts: true }
}

pub fn message(words: &[&str], from: NodeId) -> Message<P> {
    let plain = || words[1..].iter().copied().filter(|word| !word.contains('='));
    let numbers = |skip: usize| plain().skip(skip).map(|word| word.parse().unwrap()).collect::<Vec<u64>>();
    match words[0] {
        "leads" => Message::Leads(epoch(words[1])),
        "models" => {
            let model = |word: &str| {
                let (model, may_repeat) = word.strip_suffix(":once").map_or((word, true), |model| (model, false));
                ServedModel { model: model.to_owned(), version: 1, definition: Vec::new(), may_repeat }
            };
            Message::Models(words[1..].iter().map(|word| model(word)).collect())
        }
        "refuses" => {
            let refusal = |word: &&str| {
                let (number, why) = word.split_once('=').unwrap();
                let why = match why {
                    "lost" => Refusal::Lost,
                    missed if missed.contains('#') => Refusal::Missed(batch(missed)),
                    "hopeless" => Refusal::Dropped(DropReason::Hopeless),
                    "full" => Refusal::Rejected(Reject::QueueFull { bound: 1 }),
                    other => panic!("refused as {other}?"),
                };
                (number.parse().unwrap(), why)
            };
            Message::Refused(words[1..].iter().map(refusal).collect())
        }
        "claims" => {
            let backend = option(words, "for").map_or(from, id);
            Message::Claim { batch: batch(words[1]), backend, numbers: numbers(1) }
        }
        "releases" => Message::Release { batch: batch(words[1]), numbers: numbers(1) },
        "answers" => {
            let answer = |word: &str| match word.strip_suffix(":streamed") {
                Some(number) => (number.parse().unwrap(), Outcome::Streamed),
                None => (word.parse().unwrap(), Outcome::Outputs(word.parse().unwrap())),
            };
            let answers: Vec<_> = plain().map(answer).collect();
            let run = batch_run((answers.len() as u32, Duration::from_millis(5)));
            Message::Answers { run: Some(run), answers }
        }
        "streams" => {
            let number = words[1].parse().unwrap();
            Message::Streamed { number, answer: Some(Outcome::Outputs(number)), is_last: words.len() > 2 }
        }
        "room" => Message::Room { number: words[1].parse().unwrap(), answers: words[2].parse().unwrap() },
        "cancels" => Message::Cancel(numbers(0)),
        "names" => {
            let (alias, model) = words[1].split_once('=').unwrap();
            Message::Queue { alias: QueueAlias(alias.parse().unwrap()), key: queue(model) }
        }
        "assigns" => {
            let stamp = Stamp { epoch: epoch(words[1]), number: words[2].parse().unwrap() };
            let models = |name| option(words, name).map_or(Vec::new(), |m| m.split(',').map(str::to_owned).collect());
            let (planned, kept) = (models("planned"), models("kept"));
            let number = option(words, "plan").map_or(stamp.number, |number| number.parse().unwrap());
            Message::Assign(Assignment { stamp, plan: Stamp { number, ..stamp }, sub_cluster: 0, planned, kept })
        }
        "stands_by" => Message::Standing { epoch: epoch(words[1]), leads: false },
        "lets_go" => Message::LetGo,
        "meets" => Message::Meet { frontend: id(words[1]), address: format!("{}:1", words[1]) },
        "plans" => {
            let number = |name| option(words, name).map_or(0, |value| value.parse().unwrap());
            let members: Vec<RequestKey> = plain().skip(1).map(key).collect();
            Message::Plan(Plan {
                batch: batch(words[1]),
                slot: number("slot"),
                queue: QueueAlias(number("queue")),
                size: members.len() as u32,
                members,
                starts_in: Duration::ZERO,
                expected: option(words, "expected").map_or(Duration::from_millis(5), millis),
            })
        }
        "inputs" => {
            let left = option(words, "left").map_or(Duration::MAX, millis);
            let granted = numbers(1).into_iter().map(|n| (n, left, n)).collect();
            let gone = option(words, "gone").map_or(Vec::new(), |g| g.split(',').map(|n| n.parse().unwrap()).collect());
            Message::Inputs { batch: batch(words[1]), granted, gone }
        }
        other => panic!("{from:?} {other}?"),
    }
}

pub fn message_text(message: &Message<P>) -> String {
    let numbers = |numbers: &[u64]| list(numbers.iter().map(u64::to_string));
    match message {
        Message::Queue { alias, key } => format!("{} is {}", alias.0, key.model),
        Message::Requests(requests) => {
            let request = |r: &HandedIn| {
                let tried = if r.tried > 0 { format!(" tried {}", r.tried) } else { String::new() };
                let left = if r.left == Duration::MAX { String::new() } else { format!(" within {}", r.left) };
                let ready =
                    if r.ready_in > Duration::ZERO { format!(" ready in {}", r.ready_in) } else { String::new() };
                format!("{} of {}{left}{ready}{tried}", r.number, r.queue.0)
            };
            format!("requests {}", list(requests.iter().map(request)))
        }
        Message::Cancel(gone) => format!("cancel {}", numbers(gone)),
        Message::Ready(ready) => format!("ready {}", numbers(ready)),
        Message::Taken(epoch) => format!("{} is taken", epoch_text(*epoch)),
        Message::Standing { epoch, .. } => format!("not below {}", epoch_text(*epoch)),
        Message::Offer(offer) => {
            let models = list(offer.models.iter().map(|model| model.model.clone()));
            let heard = offer.assigned.as_ref().map_or(String::new(), |a| format!(", heard {}", a.stamp.number));
            let failed = offer.repository.iter().filter_map(|l| Some(format!(", {}: {}", l.model, l.failed.as_ref()?)));
            format!("offer of {models} on {} slots{heard}{}", offer.slots.len(), failed.collect::<String>())
        }
        Message::Delays(_) => "delays".to_owned(),
        Message::UnderWay(running) => {
            let one = |r: &Running| format!("{} on slot {} for {}", batch_text(r.batch), r.slot, r.ends_in);
            format!("under way: {}", list(running.iter().map(one)))
        }
        Message::Completed { batch, ran, missed } => {
            let ran = ran.map_or("nothing".to_owned(), |(items, took)| format!("{items} items in {took}"));
            let missed = if missed.is_empty() {
                String::new()
            } else {
                format!(", missed {}", list(missed.iter().copied().map(key_text)))
            };
            format!("completed {}: {ran}{missed}", batch_text(*batch))
        }
        Message::Leave => "leave".to_owned(),
        Message::Inputs { batch, granted, gone } => {
            assert!(granted.iter().all(|(number, _, payload)| number == payload));
            let granted = list(granted.iter().map(|(number, left, _)| match *left {
                Duration::MAX => number.to_string(),
                left => format!("{number} within {left}"),
            }));
            let gone = if gone.is_empty() { String::new() } else { format!(", gone {}", numbers(gone)) };
            format!("inputs of {}: {granted}{gone}", batch_text(*batch))
        }
        Message::Release { batch, numbers: released } => {
            format!("release {} {}", batch_text(*batch), numbers(released))
        }
        Message::Answers { run, answers } => {
            let counted = if run.is_some_and(|run| !run.counts) { ", counted elsewhere" } else { "" };
            let answer = |(number, outcome): &(u64, Outcome<P>)| match outcome {
                Outcome::Streamed => format!("{number} is streamed"),
                _ => number.to_string(),
            };
            format!("answers {}{counted}", list(answers.iter().map(answer)))
        }
        Message::Streamed { number, answer, is_last } => {
            format!("{} of {number}", streamed_text(answer.as_ref(), *is_last))
        }
        Message::Room { number, answers } => format!("room for {answers} answers of {number}"),
        other => format!("{other:?}"),
    }
}

pub fn streamed_text(answer: Option<&Outcome<P>>, is_last: bool) -> String {
    let which = if is_last { "the last" } else { "an" };
    match answer {
        Some(_) => format!("{which} answer"),
        None => format!("the end, without {which} answer,"),
    }
}

pub fn end_text(end: &RequestEnd<P>) -> String {
    match end {
        RequestEnd::Ran(Outcome::Streamed, _) => "ran, answers come one by one".to_owned(),
        RequestEnd::Ran(..) => "ran".to_owned(),
        RequestEnd::Refused(refusal) => format!("refused, {refusal:?}"),
        RequestEnd::TooLate => "too late".to_owned(),
        RequestEnd::Lost => "lost".to_owned(),
        RequestEnd::NoLeader => "nobody leads".to_owned(),
    }
}

pub fn list(texts: impl Iterator<Item = String>) -> String {
    let texts: Vec<String> = texts.collect();
    if texts.is_empty() { "nothing".to_owned() } else { texts.join(", ") }
}

pub fn option<'a>(words: &[&'a str], name: &str) -> Option<&'a str> {
    words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

pub fn millis(text: &str) -> Duration {
    Duration::from_millis_f64(text.parse().unwrap())
}

/// `f1` is 1101, `s0'` is 10100.
pub fn id(name: &str) -> NodeId {
    let base = match &name[..1] {
        "s" => 100,
        "f" => 1_100,
        _ => 2_100,
    };
    let anew = name.matches('\'').count() as u64;
    NodeId(base + name[1..].trim_end_matches('\'').parse::<u64>().unwrap() + 10_000 * anew)
}

pub fn name(node: NodeId) -> String {
    let (anew, rest) = (node.0 / 10_000, node.0 % 10_000);
    let role = ["s", "f", "b"][(rest / 1_000) as usize];
    format!("{role}{}{}", rest % 100, "'".repeat(anew as usize))
}

pub fn queue(model: &str) -> QueueKey {
    QueueKey { model: model.to_owned(), version: 1, shape: Vec::new() }
}

/// Of models, `m,n` or `none`.
pub fn offer(models: &str, slots: u32) -> Offer {
    let profiles: Vec<_> = (0..slots).map(|slot| (slot, LatencyProfile::linear_ms(1.0, 4.0, 16).unwrap())).collect();
    let model = |model: &str| OfferedModel {
        model: model.to_owned(),
        version: 1,
        fingerprint: String::new(),
        definition: Vec::new(),
        max_batch: 16,
        drop: DropPolicy::None,
        dispatch: DispatchPolicy::Eager,
        max_wait: Duration::MAX,
        levels: Vec::new(),
        at_once: u32::MAX,
        item_bytes: 1_000,
        may_repeat: true,
        shape: Vec::new(),
        profiles: profiles.clone(),
    };
    let models = models.split(',').filter(|name| *name != "none").map(model).collect();
    let slots = (0..slots).map(|_| Slot { hardware: "cpu".to_owned(), device: 0, is_seat: false }).collect();
    Offer { slots, models, ..Offer::default() }
}

pub fn epoch(text: &str) -> Epoch {
    let (number, rank) = text.split_once('/').unwrap();
    Epoch { number: number.parse().unwrap(), rank: rank.parse().unwrap() }
}

pub fn epoch_text(epoch: Epoch) -> String {
    let rank = if epoch.rank == u32::MAX { "-".to_owned() } else { epoch.rank.to_string() };
    format!("{}/{rank}", epoch.number)
}

pub fn batch(text: &str) -> BatchKey {
    let (epoch, batch) = text.split_once('#').unwrap();
    BatchKey { epoch: self::epoch(epoch), batch: BatchId(batch.parse().unwrap()) }
}

pub fn batch_text(batch: BatchKey) -> String {
    format!("{}#{}", epoch_text(batch.epoch), batch.batch.0)
}

pub fn key(text: &str) -> RequestKey {
    let (frontend, number) = text.split_once(':').unwrap();
    RequestKey { frontend: id(frontend), number: number.parse().unwrap() }
}

pub fn key_text(key: RequestKey) -> String {
    format!("{}:{}", name(key.frontend), key.number)
}
