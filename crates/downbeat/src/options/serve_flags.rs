//! The flags of `downbeat serve`: the flags of the [keys](crate::options::keys), and the few that are no
//! keys.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::options::draft::Draft;
use crate::options::forms::Given;
use crate::options::key::{Arity, Key};
use crate::options::keys::KEYS;
use crate::options::triton_flags::OtherFlags;

/// Serve the models of a repository.
///
/// Options come from the defaults, then downbeat.toml, then the environment, then flags; the later
/// wins.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeFlags {
    #[command(flatten)]
    pub keys: KeyFlags,

    /// Options file; without it ./downbeat.toml, or else downbeat.toml in the repository, if there
    /// is one (that file may only say how models are served)
    #[arg(long, value_name = "FILE", env = "DOWNBEAT_CONFIG")]
    pub config: Option<PathBuf>,

    /// A plan that `downbeat plan --json` has printed: each of its sub-clusters gets devices of its
    /// own. Wins over [placement]
    #[arg(long, value_name = "FILE", env = "DOWNBEAT_PLAN", help_heading = "Models")]
    pub plan: Option<PathBuf>,

    /// Refuse flags of Triton that have no counterpart here, instead of ignoring them with a
    /// warning
    #[arg(long, help_heading = "Operation")]
    pub strict_flags: bool,

    #[command(flatten)]
    pub others: OtherFlags,
}

/// The values of the keys from flags and the environment.
#[derive(Clone, Debug, Default)]
pub struct KeyFlags(Vec<(&'static Key<Draft>, Vec<String>)>);

/// The repositories may also be given as arguments. Their flag is Triton's.
const REPOSITORY: &str = "model-repository";

impl KeyFlags {
    /// The values of a flag; empty if the flag is not given.
    pub fn values(&self, flag: &str) -> &[String] {
        self.0.iter().find(|(key, _)| key.flag == flag).map_or(&[], |(_, values)| values)
    }

    /// Sets the values of the flags.
    ///
    /// # Errors
    /// If a value is invalid.
    pub fn apply(&self, draft: &mut Draft) -> anyhow::Result<()> {
        let set = |(key, values): &(&Key<Draft>, Vec<String>)| (key.set)(draft, &Given::texts(values));
        self.0.iter().try_for_each(set).map_err(anyhow::Error::msg)
    }
}

/// Checks a value of a key on the command line, and names the choices for shells. The value stays a
/// text, and is set later.
#[derive(Clone)]
struct Checked(&'static Key<Draft>);

impl TypedValueParser for Checked {
    type Value = String;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        let check = |text: &str| {
            let text = text.to_owned();
            (self.0.set)(&mut Draft::default(), &Given::texts(std::slice::from_ref(&text))).map(|()| text)
        };
        check.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        (!self.0.choices.is_empty()).then(|| Box::new(self.0.choices.iter().map(PossibleValue::new)) as Box<_>)
    }
}

fn argument(key: &'static Key<Draft>) -> Arg {
    let default = match key.without {
        "" => key.default.trim_matches('"'),
        "none" => "",
        without => without,
    };
    let default = if default.is_empty() { String::new() } else { format!(" [default: {default}]") };
    let mut argument = Arg::new(key.flag).hide(key.is_hidden).help(format!("{}{default}", key.help));
    if key.arity == Arity::Bare {
        argument = argument.action(ArgAction::SetTrue);
    } else {
        // The help names the choices and explains them.
        argument = argument.value_name(key.unit).value_parser(Checked(key)).hide_possible_values(true);
        // -1 stands for no limit.
        argument = argument.allow_negative_numbers(true);
    }
    if !key.heading.is_empty() {
        argument = argument.help_heading(key.heading);
    }
    if !key.variable().is_empty() {
        argument = argument.env(&*key.variable().leak());
    }
    if key.flag == REPOSITORY {
        return argument.action(ArgAction::Append);
    }
    argument = argument.long(key.flag).aliases(Some(key.alias).filter(|alias| !alias.is_empty()));
    match key.arity {
        Arity::One | Arity::Bare => argument,
        Arity::Optional => argument.num_args(0..=1).require_equals(true).default_missing_value("true"),
        Arity::Many => argument.action(ArgAction::Append).value_delimiter(','),
        Arity::Repeated => argument.action(ArgAction::Append),
    }
}

impl Args for KeyFlags {
    fn augment_args(command: Command) -> Command {
        let repository = Arg::new("model-store").long(REPOSITORY).alias("model-store").value_name("REPOSITORY");
        let keys = KEYS.iter().filter(|key| !key.flag.is_empty());
        command.args(keys.map(argument)).arg(repository.action(ArgAction::Append).hide(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KeyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let values = |flag: &str| matches.get_many::<String>(flag).map(|values| values.cloned().collect::<Vec<_>>());
        let given = KEYS.iter().filter(|key| !key.flag.is_empty()).filter_map(|key| match key.arity {
            Arity::Bare => matches.get_flag(key.flag).then(|| (key, vec!["true".to_owned()])),
            _ if key.flag == REPOSITORY => values("model-store").or(values(REPOSITORY)).map(|values| (key, values)),
            _ => values(key.flag).map(|values| (key, values)),
        });
        Ok(KeyFlags(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
