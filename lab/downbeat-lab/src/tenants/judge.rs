//! The judge of tenants: attainment, device time and idle devices, from the log alone.

use downbeat_core::{Duration, Time};

use super::play::TenantLog;
use super::workload::TenantArrival;

/// A judge that knows the arrivals, the SLO of each model and the number of devices.
#[derive(Clone, Copy, Debug)]
pub struct TenantJudge<'a> {
    /// The requests.
    pub arrivals: &'a [TenantArrival],
    /// By model: time from a request's arrival to its deadline.
    pub slos: &'a [Duration],
    /// The number of devices.
    pub devices: u32,
    /// The number of tenants.
    pub tenants: u32,
    /// Requests and batches count from this time to `end`.
    pub begin: Time,
    /// The end of the counted time.
    pub end: Time,
}

/// The counts of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct TenantVerdict {
    /// By tenant: requests that came in the counted time.
    pub asked: Vec<u64>,
    /// By tenant: such requests that were answered by their deadlines.
    pub good: Vec<u64>,
    /// By tenant: seconds of device time.
    pub device_seconds: Vec<f64>,
    /// Part of the devices' time that was idle while a request waited that was given up later.
    pub idle_while_lost: f64,
    /// Part of the devices' time in which batches ran.
    pub busy: f64,
}

/// A rule that this run broke, and every run must keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BrokenTenantRule {
    /// An end or a batch names no request.
    #[error("request {0} has ended, but never came")]
    Unknown(usize),
    /// A request has two ends.
    #[error("request {0} has ended twice")]
    Twice(usize),
    /// A request has no end.
    #[error("request {0} has not ended")]
    Never(usize),
    /// A request ended before it came.
    #[error("request {0} has ended before it came")]
    Early(usize),
    /// A device ran two batches at a time.
    #[error("device {0} ran two batches at a time")]
    Overlap(u32),
    /// A request ended as one that ran, and was in no batch, or the other way round.
    #[error("request {0} has an end that does not fit the batches")]
    NoBatch(usize),
}

impl TenantVerdict {
    /// The part of a tenant's requests that was answered by the deadline.
    pub fn attainment(&self, tenant: usize) -> f64 {
        self.good[tenant] as f64 / (self.asked[tenant] as f64).max(1.0)
    }

    /// All requests that were answered by their deadlines.
    pub fn all_good(&self) -> u64 {
        self.good.iter().sum()
    }

    /// A tenant's part of the device time of all tenants.
    pub fn part(&self, tenant: usize) -> f64 {
        self.device_seconds[tenant] / self.device_seconds.iter().sum::<f64>().max(1e-9)
    }
}

impl TenantJudge<'_> {
    /// Counts the log.
    ///
    /// # Errors
    /// If a request has not ended exactly once at or after its arrival, or a device ran two batches
    /// at a time.
    pub fn judge(&self, log: &TenantLog) -> Result<TenantVerdict, BrokenTenantRule> {
        let ends = self.ends(log)?;
        self.check_batches(log, &ends)?;
        let tenants = self.tenants as usize;
        let (mut asked, mut good) = (vec![0; tenants], vec![0; tenants]);
        for (arrival, (at, ran)) in self.arrivals.iter().zip(&ends) {
            if (self.begin..self.end).contains(&arrival.at) {
                asked[arrival.tenant as usize] += 1;
                let in_time = *ran && *at <= arrival.at + self.slos[arrival.model as usize];
                good[arrival.tenant as usize] += u64::from(in_time);
            }
        }
        let mut device_seconds = vec![0.0; tenants];
        for batch in &log.batches {
            let seconds = self.counted(batch.start, batch.end) / batch.members.len().max(1) as f64;
            for member in &batch.members {
                device_seconds[self.arrivals[*member].tenant as usize] += seconds;
            }
        }
        let all = f64::from(self.devices) * self.end.since(self.begin).as_secs_f64();
        let busy = device_seconds.iter().sum::<f64>() / all;
        Ok(TenantVerdict { asked, good, device_seconds, idle_while_lost: self.idle_while_lost(log, &ends) / all, busy })
    }

    /// Seconds of the counted time between two instants.
    fn counted(&self, from: Time, to: Time) -> f64 {
        to.min(self.end).since(from.max(self.begin)).as_secs_f64()
    }

    fn ends(&self, log: &TenantLog) -> Result<Vec<(Time, bool)>, BrokenTenantRule> {
        let mut ends = vec![None; self.arrivals.len()];
        for end in &log.ends {
            let slot = ends.get_mut(end.request).ok_or(BrokenTenantRule::Unknown(end.request))?;
            if slot.replace((end.at, end.ran)).is_some() {
                return Err(BrokenTenantRule::Twice(end.request));
            }
            if end.at < self.arrivals[end.request].at {
                return Err(BrokenTenantRule::Early(end.request));
            }
        }
        let ended = |(request, end): (usize, Option<_>)| end.ok_or(BrokenTenantRule::Never(request));
        ends.into_iter().enumerate().map(ended).collect()
    }

    fn check_batches(&self, log: &TenantLog, ends: &[(Time, bool)]) -> Result<(), BrokenTenantRule> {
        let mut free = vec![Time::ZERO; self.devices as usize];
        let mut ran = vec![false; ends.len()];
        for batch in &log.batches {
            let free = free.get_mut(batch.device as usize).ok_or(BrokenTenantRule::Overlap(batch.device))?;
            if batch.start < std::mem::replace(free, batch.end) {
                return Err(BrokenTenantRule::Overlap(batch.device));
            }
            for member in &batch.members {
                let ran = ran.get_mut(*member).ok_or(BrokenTenantRule::Unknown(*member))?;
                if std::mem::replace(ran, true) {
                    return Err(BrokenTenantRule::Twice(*member));
                }
            }
        }
        let odd = ran.iter().zip(ends).position(|(ran, (_, said))| ran != said);
        odd.map_or(Ok(()), |request| Err(BrokenTenantRule::NoBatch(request)))
    }

    /// Idle seconds of devices, summed, while at least one request waited that never ran.
    fn idle_while_lost(&self, log: &TenantLog, ends: &[(Time, bool)]) -> f64 {
        // Changes of the number of waiting lost requests, and of busy devices.
        let lost = self.arrivals.iter().zip(ends).filter(|(_, (_, ran))| !ran);
        let mut changes: Vec<(Time, i64, i64)> =
            lost.flat_map(|(arrival, (end, _))| [(arrival.at, 1, 0), (*end, -1, 0)]).collect();
        changes.extend(log.batches.iter().flat_map(|batch| [(batch.start, 0, 1), (batch.end, 0, -1)]));
        changes.sort_unstable();
        let (mut idle, mut lost, mut busy, mut last) = (0.0, 0, 0, Time::ZERO);
        for (at, more_lost, more_busy) in changes {
            if lost > 0 {
                idle += self.counted(last, at) * (i64::from(self.devices) - busy) as f64;
            }
            (lost, busy, last) = (lost + more_lost, busy + more_busy, at);
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::super::play::{TenantBatch, TenantEnd};
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    const SLOS: [Duration; 1] = [Duration::from_millis(10)];

    fn arrivals() -> Vec<TenantArrival> {
        let arrival = |(ms, tenant)| TenantArrival { at: at(ms), tenant, model: 0 };
        [(1, 0), (2, 1), (3, 1)].map(arrival).to_vec()
    }

    fn judged(log: &TenantLog) -> Result<TenantVerdict, BrokenTenantRule> {
        let arrivals = arrivals();
        let (begin, end) = (Time::ZERO, at(20));
        TenantJudge { arrivals: &arrivals, slos: &SLOS, devices: 1, tenants: 2, begin, end }.judge(log)
    }

    fn end(request: usize, ms: u64, ran: bool) -> TenantEnd {
        TenantEnd { request, at: at(ms), ran }
    }

    fn log() -> TenantLog {
        let batch = TenantBatch { device: 0, start: at(4), end: at(12), members: vec![0, 1] };
        TenantLog { ends: vec![end(2, 5, false), end(0, 12, true), end(1, 12, true)], batches: vec![batch] }
    }

    #[test]
    fn time_and_answers_are_counted_by_tenant() {
        let verdict = judged(&log()).unwrap();
        assert_eq!((verdict.asked.clone(), verdict.good.clone()), (vec![1, 2], vec![0, 1]));
        assert!((verdict.device_seconds[0] - 0.004).abs() < 1e-9 && (verdict.part(1) - 0.5).abs() < 1e-9);
        assert!((verdict.idle_while_lost - 0.05).abs() < 1e-9, "request 2 waited for 1 ms beside an idle device");
    }

    #[test]
    fn each_broken_rule_is_found() {
        let with = |change: fn(&mut TenantLog)| {
            let mut log = log();
            change(&mut log);
            judged(&log).unwrap_err()
        };
        assert_eq!(with(|log| log.ends[0].request = 9), BrokenTenantRule::Unknown(9));
        assert_eq!(with(|log| log.ends[0].request = 1), BrokenTenantRule::Twice(1));
        assert_eq!(with(|log| _ = log.ends.remove(0)), BrokenTenantRule::Never(2));
        assert_eq!(with(|log| log.ends[0].at = at(2)), BrokenTenantRule::Early(2));
        assert_eq!(with(|log| log.ends[0].ran = true), BrokenTenantRule::NoBatch(2));
        let again = |log: &mut TenantLog| {
            let next = TenantBatch { start: at(11), ..log.batches[0].clone() };
            log.batches.push(next);
        };
        assert_eq!(with(again), BrokenTenantRule::Overlap(0));
    }
}
