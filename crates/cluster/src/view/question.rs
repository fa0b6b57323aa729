//! Questions about the whole cluster and their answers, as bytes that schedulers hand on.

use std::io::{Read, Write};

use downbeat_core::Duration;
use downbeat_protocol::http::{statistics_from_json, statistics_to_json};
use downbeat_protocol::inference::ModelStatistics;
use downbeat_roles::MOST_ANSWER;
use downbeat_service::report::live::LiveReport;
use downbeat_service::report::policy_report::PolicyReport;
use downbeat_service::report::timeline::Timeline;
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};

/// The most bytes of an unpacked answer. A peer may send what unpacks to more.
const MOST_UNPACKED: u64 = 16 << 20;

/// A question to all frontends and backends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Question {
    /// The present counts of models and devices.
    Live { history: bool },
    /// The statistics of all models.
    Statistics,
    /// The launches of the time `last` until now.
    Timeline { last: Duration },
    /// The device policy of a model.
    Policy { model: String, version: String },
}

/// A process's answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Answer {
    Live(LiveReport),
    #[serde(serialize_with = "write_statistics", deserialize_with = "read_statistics")]
    Statistics(Vec<ModelStatistics>),
    Timeline {
        timeline: Timeline,
        /// Whether the answer has all of the time in question. A long timeline is cut.
        is_whole: bool,
    },
    /// The report, or the code and the text of an error.
    Policy(Result<Box<PolicyReport>, (u16, String)>),
    /// The process has no figures of this kind.
    Nothing,
    /// Why the answer cannot be given.
    Failed(String),
}

fn write_statistics<S: serde::Serializer>(models: &[ModelStatistics], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&statistics_to_json(models.to_vec()))
}

fn read_statistics<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<ModelStatistics>, D::Error> {
    let text = String::deserialize(from)?;
    statistics_from_json(text.as_bytes()).map_err(serde::de::Error::custom)
}

impl Question {
    /// The question as bytes.
    pub fn pack(&self) -> Vec<u8> {
        // Numbers and texts alone: writing them cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads a question. `None`: it is none of these.
    pub fn unpack(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

impl Answer {
    /// The answer as bytes, made smaller until they fit into a message.
    pub fn pack(mut self) -> Vec<u8> {
        loop {
            let packed = self.packed();
            match packed {
                Ok(packed) if packed.len() <= MOST_ANSWER => return packed,
                Ok(_) => self = self.smaller(),
                Err(error) => self = Answer::Failed(error.to_string()),
            }
        }
    }

    fn packed(&self) -> std::io::Result<Vec<u8>> {
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(&serde_json::to_vec(self)?)?;
        packed.finish()
    }

    /// A smaller answer to the same question: the later half of a timeline, counts without profiles and
    /// history, or else why there is none.
    fn smaller(self) -> Self {
        match self {
            Answer::Timeline { mut timeline, .. } if timeline.now_ns - timeline.from_ns > 1_000_000 => {
                timeline.from_ns += (timeline.now_ns - timeline.from_ns) / 2;
                for past in &mut timeline.devices {
                    past.launches.retain(|launch| launch.end_ns >= timeline.from_ns);
                }
                Answer::Timeline { timeline, is_whole: false }
            }
            Answer::Live(mut report)
                if report.models.iter().any(|model| !model.profile.is_empty() || !model.history.is_empty()) =>
            {
                for model in &mut report.models {
                    model.profile.clear();
                    model.profile_at_load.clear();
                    model.history.clear();
                }
                Answer::Live(report)
            }
            Answer::Failed(reason) => Answer::Failed(reason.chars().take(200).collect()),
            _ => Answer::Failed("its answer is too long for a message: it has too many models".to_owned()),
        }
    }

    /// Reads an answer.
    pub fn unpack(packed: &[u8]) -> Self {
        let mut text = Vec::new();
        let read = ZlibDecoder::new(packed).take(MOST_UNPACKED).read_to_end(&mut text);
        let answer = read.map_err(serde_json::Error::io).and_then(|_| serde_json::from_slice(&text));
        answer.unwrap_or_else(|error| Answer::Failed(format!("its answer cannot be read: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use downbeat_service::report::live::LiveModel;
    use downbeat_service::report::timeline::{PastLaunch, PastLaunches};

    use super::*;

    #[test]
    fn answers_come_back_as_they_were() {
        let models = vec![ModelStatistics { name: "m".into(), inference_count: 3, ..Default::default() }];
        for answer in [Answer::Nothing, Answer::Policy(Err((404, "no model".into())))] {
            assert_eq!(Answer::unpack(&answer.clone().pack()), answer);
        }
        let Answer::Statistics(read) = Answer::unpack(&Answer::Statistics(models).pack()) else { panic!("another") };
        assert_eq!((&*read[0].name, read[0].inference_count), ("m", 3));
        for wrong in [&b""[..], b"x", &Answer::Nothing.pack()[..3]] {
            assert!(matches!(Answer::unpack(wrong), Answer::Failed(_)));
        }
        let question = Question::Policy { model: "m".into(), version: String::new() };
        assert_eq!(Question::unpack(&question.pack()), Some(question));
        assert_eq!(Question::unpack(b"{}"), None);
    }

    /// Numbers that do not shrink when they are packed.
    fn noise(seed: u64) -> u64 {
        seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    }

    #[test]
    fn a_long_timeline_is_cut_to_its_end() {
        let launch = |at: u64| PastLaunch { begin_ns: at, end_ns: at, batch: noise(at), ..PastLaunch::default() };
        let (from_ns, now_ns) = (0, 60_000_000_000);
        let launches = (0..60_000).map(|place| launch(place * 1_000_000)).collect();
        let devices = vec![PastLaunches { launches, ..PastLaunches::default() }];
        let timeline = Timeline { from_ns, now_ns, devices, rules: Default::default(), backends: Vec::new() };
        let packed = Answer::Timeline { timeline, is_whole: true }.pack();
        assert!(packed.len() <= MOST_ANSWER);
        let Answer::Timeline { timeline, is_whole } = Answer::unpack(&packed) else { panic!("another answer") };
        let launches = &timeline.devices[0].launches;
        assert!(!is_whole && !launches.is_empty() && launches.len() < 60_000);
        assert_eq!(launches.last().map(|launch| launch.end_ns), Some(59_999_000_000));
    }

    #[test]
    fn counts_of_too_many_models_lose_profiles_and_then_fail() {
        let report = |models: u64, sizes: u32| -> Answer {
            let model = |number: u64| LiveModel {
                model: format!("{:x}{:x}", noise(number), noise(number + 7)),
                profile: (1..=sizes).map(|size| (size, noise(number + u64::from(size)) as f64)).collect(),
                ..LiveModel::default()
            };
            let models: Vec<LiveModel> = (0..models).map(model).collect();
            let report = serde_json::json!({
                "server": "s", "version": "0", "wall_ms": 0, "now_ns": 0, "latency_bounds_ms": [], "batch_bounds": [],
                "models": models, "device_busy_s": [], "history_part_s": 10.0, "in_cluster": true,
            });
            Answer::Live(serde_json::from_value(report).unwrap())
        };
        let Answer::Live(read) = Answer::unpack(&report(800, 64).pack()) else { panic!("another answer") };
        assert!(read.models.len() == 800 && read.models.iter().all(|model| model.profile.is_empty()));
        assert!(matches!(Answer::unpack(&report(20_000, 0).pack()), Answer::Failed(_)));
    }
}
