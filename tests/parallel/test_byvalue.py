"""What a program defines in `__main__` is the same thing in workers and comes home as itself, without a guard."""

from fresh import environment, python

ON_COMMIT = ("spawn",)
PROGRAM = '''
import abc, collections, contextvars, enum, sys, typing
from datamat.parallel import PathosExecutor

class Movie(typing.TypedDict, total=False):
    """A movie."""
    name: str
    year: typing.Required[int]

class Long(Movie):
    minutes: int

def typed_dict(movie):
    assert Movie.__required_keys__ == {"year"} and Movie.__doc__ == "A movie."
    assert typing.is_typeddict(Movie) and Long.__annotations__.keys() == {"name", "year", "minutes"}
    assert typing.get_type_hints(Movie) == {"name": str, "year": int}
    return Long(name=movie["name"], year=1, minutes=3), Movie

UserId = typing.NewType("UserId", int)
T = typing.TypeVar("T", bound=int)
P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")

def names_of_typing():
    assert UserId(3) == 3 and UserId.__supertype__ is int and T.__bound__ is int
    return [UserId, T, P, Ts]

class Level(enum.Enum):
    LOW = 1
    HIGH = 2
    @classmethod
    def _missing_(cls, value):
        return cls.LOW if value < 1 else cls.HIGH

class Planet(enum.Enum):
    EARTH = (6.0, 3.0)
    MARS = (0.6, 3.3)
    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius
    @property
    def density(self):
        return self.mass / self.radius

class Coord(bytes, enum.Enum):
    def __new__(cls, value, label):
        made = bytes.__new__(cls, [value])
        made._value_, made.label = value, label
        return made
    PX = (0, "x")
    PY = (1, "y")

class Auto(enum.Enum):
    def __new__(cls):
        made = object.__new__(cls)
        made._value_ = len(cls.__members__) + 1
        return made
    A = ()
    B = ()

class Permission(enum.Flag, boundary=enum.KEEP):
    R = 4
    W = 2
    RW = 6

class Number(enum.IntEnum):
    ONE = 1
    ALIAS = 1

class Pair(tuple, enum.Enum):
    A = (1, 2)

class Named(enum.StrEnum):
    FIRST = enum.auto()

class Searchable(enum.EnumMeta):
    def __contains__(cls, name):
        return name in cls.__members__

class Found(enum.Enum, metaclass=Searchable):
    HERE = 1

def enums(level, planet, coord, auto):
    assert level is Level.LOW and Level(-3) is Level.LOW and Level(9) is Level.HIGH
    assert planet is Planet.EARTH and planet.density == 2 and Planet((0.6, 3.3)).mass == 0.6
    assert coord is Coord.PX and coord.label == "x" and Coord(1).label == "y" and bytes.__eq__(Coord.PY, bytes([1]))
    assert auto is Auto.A and Auto(2) is Auto.B and list(Auto) == [Auto.A, Auto.B]
    assert Permission.R | Permission.W is Permission.RW and Permission(14).value == 14
    assert Number.ALIAS is Number.ONE and Number.ONE + 1 == 2 and Pair((1, 2)).value[1] == 2
    assert Named.FIRST.upper() == "FIRST" and "HERE" in Found and "GONE" not in Found
    return Level.HIGH, Planet.MARS, Coord.PY, Auto.B

class Meta(type):
    def __new__(mcs, name, bases, body):
        body["title"] = body["table"].title() + body["run"].__name__
        return super().__new__(mcs, name, bases, body)
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        cls.methods = [key for key, value in body.items() if callable(value)]

class Model(metaclass=Meta):
    table = "models"
    def run(self):
        return self.title, self.methods

class ShapeMeta(abc.ABCMeta):
    def __new__(mcs, name, bases, body):
        made = super().__new__(mcs, name, bases, body)
        made.tag = body["kind"]
        return made

class Shape(metaclass=ShapeMeta):
    kind = "shape"
    @abc.abstractmethod
    def area(self):
        """Return the area."""

class Square(Shape):
    kind = "square"
    def area(self):
        return self.tag, isinstance(self, Shape)

registered = []

class Plugin:
    def __init_subclass__(cls, *, key):
        cls.key = key + cls.needed
        registered.append(cls)

class Mine(Plugin, key="my "):
    needed = "body"
    def run(self):
        return self.key, registered == [Mine]

current = contextvars.ContextVar("current", default="nothing")
unset = contextvars.ContextVar("unset")

class Request:
    def __init__(self):
        self.variable = current
    def run(self):
        assert self.variable is current and unset.get(None) is None
        token = current.set("inner")
        assert current.get() == "inner"
        current.reset(token)
        return current.get(), current

def value_of(variable, context):
    return variable.get(), context.run(variable.get)

def ten():
    return 10

class Restored:
    def __init__(self):
        self.number = 1
    def __getstate__(self):
        return {"number": self.number}
    def __setstate__(self, state):
        self.number = state["number"] + ten()
    def run(self):
        return self.number

def named_tuple():
    Local = collections.namedtuple("Local", "a b")
    return Local(1, 2)

def typed_named_tuple():
    class Local(typing.NamedTuple):
        a: int
        b: int = 2
        def total(self):
            return self.a + self.b
    return Local(1)

def global_class():
    global Made
    Made = collections.namedtuple("Made", "a b")
    return Made(1, 2)

def global_class_again():
    return Made(3, 4)

def check(call):
    movie, kind = call(typed_dict, Movie(name="x", year=3))
    assert movie == {"name": "x", "year": 1, "minutes": 3} and kind is Movie
    back = call(names_of_typing)
    assert all(a is b for a, b in zip(back, [UserId, T, P, Ts], strict=True)), back
    back = call(enums, Level.LOW, Planet.EARTH, Coord.PX, Auto.A)
    assert all(a is b for a, b in zip(back, [Level.HIGH, Planet.MARS, Coord.PY, Auto.B], strict=True))
    assert call(Model().run) == ("Modelsrun", ["run"])
    assert call(Square().area) == ("square", True)
    assert call(Mine().run) == ("my body", True)
    assert call(Restored().run) == 11 and call(Restored.run, Restored()) == 11
    value, variable = call(Request().run)
    assert value == "outer" and variable is current
    assert call(value_of, current, contextvars.copy_context()) == ("outer", "outer")
    assert call(named_tuple)._asdict() == {"a": 1, "b": 2}
    assert call(typed_named_tuple).total() == 3
    assert call(global_class) == (1, 2) and call(global_class_again).b == 4
    assert "Made" not in globals()

current.set("outer")
with PathosExecutor(1, start_method=sys.argv[1]) as executor:
    executor.submit(abs, 1).result(30)
    check(lambda function, *args: executor.submit(function, *args).result(30))
print("done")
'''


def test_what_main_defines_is_the_same_in_workers(method, tmp_path):
    """Among it are classes that a worker rebuilds in two steps, and type variables, known by identity alone."""
    (tmp_path / "script.py").write_text(PROGRAM)

    done = python("script.py", method, cwd=tmp_path, env=environment(PYTHONWARNINGS="error"))

    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
